"""How other frameworks name and store what this package computes with. Importing it loads none of them."""
