"""Messages: their types, their bytes, their limits, and the errors that cross the wire."""
