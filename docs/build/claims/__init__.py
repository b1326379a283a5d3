"""The paper, claim by claim: what it says as data, the rules that judge it, and the pages made of them."""
