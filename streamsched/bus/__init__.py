"""Kafka: message types, codec, topic declarations, admin, journal and the (thin) Faust agents."""
