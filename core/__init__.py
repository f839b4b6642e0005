"""Pure code: layouts, roster, plan, session machines and messages; no socket, file, clock or torch."""
