"""What the processes of one machine share, and what they leave behind."""
