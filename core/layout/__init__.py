"""What ranks hold and need: columns of pieces and their algebra."""
