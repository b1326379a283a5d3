"""Figures, tables and pages, made from run folders only."""
