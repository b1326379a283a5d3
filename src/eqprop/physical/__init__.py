"""Physical networks: circuits, oscillators and spins, imperfect devices, and machines in the loop of training."""
