"""The HTTP server: the OpenAI API over one engine, metrics, and a page to look at."""
