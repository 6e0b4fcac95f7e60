from cluster.api.request_router import draw_seed


def test_drawn_seeds_differ_and_fit_a_signed_64_bit_number():
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 1 << 63 for seed in seeds)
