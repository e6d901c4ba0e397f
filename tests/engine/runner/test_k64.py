import random, checkpoints, pytest
@pytest.mark.parametrize("kind", ["llama","mistral","qwen3","gemma2"])
def test_64(kind, checkpoint, driver, make_request):
    rng=random.Random(7); prompts=[[rng.randrange(3,320) for _ in range(rng.randint(1,600))] for _ in range(64)]
    folder=checkpoint(kind); exp=checkpoints.reference_greedy(folder,prompts,24)
    served=driver(folder,num_blocks=1300,max_num_seqs=32)
    for chunk,budget,rows in ((16,128,16),(64,512,32),(2048,2048,32)):
        rs=[make_request(p,max_new=24) for p in prompts]
        served.run(rs,chunk=chunk,budget=budget,rows=rows)
        bad=[i for i in range(64) if rs[i].output!=exp[i]]
        print(kind,chunk,'bad',bad)
        assert not bad
