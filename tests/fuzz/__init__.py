"""Models broken at random, put through burnish: whatever happens to a file, it is trained or refused by a named error.

``python -m fuzz`` (with ``tests`` on the Python path) runs cases by their numbers, tabulates what became of them, replays one,
and makes one smaller. A case is a function of the seed and its number alone.
"""
