"""OpenAI's Batch API: files of requests that are answered when online work leaves room."""
