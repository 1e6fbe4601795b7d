"""Load for the scheduler: real and synthetic workloads, their replay into Kafka, simulated executors, and an audit."""
