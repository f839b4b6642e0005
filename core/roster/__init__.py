"""Who takes part, and where: declared rosters, registrations, the rules between them, and topologies."""
