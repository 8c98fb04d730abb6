"""Episodes: rollouts of one or several turns, with what tools and environments answer between them."""
