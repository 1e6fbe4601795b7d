"""Redis: a view of what Kafka holds, changed by one atomic script per commit."""
