"""The core in virtual time. Imports the core, policies, placement and routing; never Kafka, Redis or the service."""
