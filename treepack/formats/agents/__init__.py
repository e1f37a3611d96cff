"""Sessions and trajectories of agents and assistants."""
