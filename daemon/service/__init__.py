"""What a service manager asks of the daemon: readiness, a status line, a watchdog, and unit files of its own."""
