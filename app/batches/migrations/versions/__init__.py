"""One file for each change of the tables. A file that was released is never changed."""
