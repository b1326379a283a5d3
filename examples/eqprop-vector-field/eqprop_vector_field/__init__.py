"""An example of parts from outside: see the estimator and the engine, one file each."""
