"""Where keys and values live: the target's pages and the draft head's ring."""
