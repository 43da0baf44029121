"""Losses of detectors: which prediction answers for which object, and what that costs. One file per published loss.

``targets`` has what all of them read, ``anchors`` where predictions lie in a picture. Boxes of objects are two corners, as
fractions of the width and height of a picture. The assignment is part of the graph, from operators that any runtime has, and no
gradient goes through it: a program stays a function of its batch, which a runtime without Python runs too.
"""
