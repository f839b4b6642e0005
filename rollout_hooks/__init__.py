"""What a rollout rank imports: it declares what it needs and receives versions."""
