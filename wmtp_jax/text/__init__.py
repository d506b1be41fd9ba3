"""Between characters and tokens: tokenizers, chat templates, text that arrives token by token, stop strings."""
