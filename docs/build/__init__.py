"""The page builder: text is written by hand, tables and pictures come from results/.

python -m docs.build            fill every marked block and draw every picture
python -m docs.build --check    change nothing; exit with 1 if a page is not current
"""
