"""What the numbers of runs say, and how surely: profiles by length, intervals, comparisons."""
