"""What a trainer rank imports: it describes its shards and publishes versions."""
