"""How each framework's parameters become shards; which one applies is found out from the parameters themselves."""
