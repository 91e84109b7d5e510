"""Claims that were false once, each red before it was mended.

| what | file |
|---|---|
| a known seed of the draws | known_seed_test |
| the number of participants published | published_number_test |
| the empty round; a mean of a secret number | mean_with_floor_test |
| a client that fits its own coordinate (the reverse direction) | held_out_test |
| a stop that tells | stopping_test |
| the individual filter | individual_filter_test |
| a mechanism that lets the largest through: documented, not claimed away |
  largest_gets_through_test |
| floats | floats_test |
| a fixed number of participants | fixed_size_test |
| noise that depends on who came | noise_scale_test |
"""
