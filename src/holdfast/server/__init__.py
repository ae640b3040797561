"""The keeper: a store, served to agents over the network, under rules."""
