"""Builds the site: tutorials executed, mathematics as MathML, pages made from results."""
