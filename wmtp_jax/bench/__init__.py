"""What `wmtp bench` measures: acceptance in long contexts, speed against Hugging Face, time to the first token."""
