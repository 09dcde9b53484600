"""The HTTP side: OpenAI's API, the tokenizer, streaming, API keys. It knows nothing of pages."""
