"""Array operations with no idea of a model: one folder an op, a reference and portable or device implementations."""
