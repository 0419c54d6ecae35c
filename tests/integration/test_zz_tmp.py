import pytest
from tests.integration.test_equivalence import *
@pytest.mark.parametrize("i", range(20))
@pytest.mark.parametrize("epochs", [3])
@pytest.mark.parametrize("servers", [2])
def test_x(run, i, epochs,servers):
    opt="sgd"
    ran = go(run, workers=3, optimizer=opt, batch=4, samples=61, epochs=epochs,job={"servers":servers})
    got, exp = ran.model, plain(opt, batch=12, samples=61, epochs=epochs)[0]
    print("RES", i, epochs, servers, max((got[k]-exp[k]).abs().max().item() for k in got), [k for k in got if (got[k]-exp[k]).abs().max().item()>1e-6])
