"""From prompts to text: the options of a request, its rows, its measurements, and the stream that drives the loop."""
