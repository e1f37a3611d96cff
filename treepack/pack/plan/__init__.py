"""Plans: the row of each trajectory, chosen by a method, bounded from below, and checked."""
