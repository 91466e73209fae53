//! Stock PyTorch programs under `tenfold run`.
//!
//! Needs a Python with PyTorch 2.15 in TENFOLD_TORCH_PYTHON; `./test` sets that up. Without it, nextest skips
//! this file (see `.config/nextest.toml`), and says so.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = "
import os, sys
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    assert dist.is_torchelastic_launched()
    dist.init_process_group('gloo')
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor)
    print(f'{sys.argv[1]} {rank} of {size}: {tensor.tolist()}')
    dist.destroy_process_group()
    if rank == 1:
        raise ValueError(f'rank {rank} fails on purpose')

main()
";

/// The environment of a rank, beyond the launcher's own.
const SHOW_ENVIRONMENT: &str = "
import json, os, sys
with open(sys.argv[1] + os.environ['RANK'], 'w') as file:
    json.dump(dict(os.environ), file)
";

fn environments(launcher: &mut Command, folder: &Path, options: &[&str]) -> Vec<BTreeMap<String, String>> {
    let program = folder.join("environment.py");
    std::fs::write(&program, SHOW_ENVIRONMENT).expect("a folder of ours");
    let target = folder.join("rank");
    launcher.args(options).arg(&program).arg(&target).env_clear();
    let output = launcher.env("PATH", "/usr/bin:/bin").output().expect("it can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |rank: usize| {
        let file = std::fs::read(format!("{}{rank}", target.display())).expect("every rank wrote one");
        serde_json::from_slice(&file).expect("it is JSON")
    };
    (0..2).map(read).collect()
}

#[test]
fn ranks_find_what_they_would_find_under_torchrun() {
    let python = std::env::var("TENFOLD_TORCH_PYTHON")
        .expect("run `./test`, or set TENFOLD_TORCH_PYTHON to a Python with PyTorch 2.15");
    let folder = tempfile::tempdir().unwrap();
    let options =
        ["--nproc_per_node=2", "--role=trainer", "--max_restarts=3", "--signals_to_handle=SIGTERM,SIGINT"];
    let mut torchrun = Command::new(&python);
    let expected = environments(torchrun.args(["-m", "torch.distributed.run"]), folder.path(), &options);
    let mut tenfold = Command::new(env!("CARGO_BIN_EXE_tenfold"));
    let found = environments(tenfold.args(["run", "--python", &python]), folder.path(), &options);
    // Differ from run to run, or contain what differs.
    let own = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"];
    for (expected, mut found) in expected.into_iter().zip(found) {
        for (name, value) in expected {
            let other = found.remove(&name).unwrap_or_else(|| panic!("no {name}"));
            assert!(own.contains(&name.as_str()) || other == value, "{name}: {other}, torchrun: {value}");
        }
        let more: Vec<String> = found.into_keys().collect();
        assert_eq!(
            more,
            [
                "PYTHONUNBUFFERED",
                "RAYON_NUM_THREADS",
                "TENFOLD_FENCE",
                "TENFOLD_PROGRESS",
                "TENFOLD_RUN_MARK"
            ]
        );
    }
}

#[test]
fn a_gloo_program_uses_the_launchers_store_and_its_traceback_is_shown() {
    let python = std::env::var("TENFOLD_TORCH_PYTHON")
        .expect("run `./test`, or set TENFOLD_TORCH_PYTHON to a Python with PyTorch 2.15");
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program.py");
    std::fs::write(&program, PROGRAM).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tenfold"))
        .args(["run", "-n", "2", "--python", &python])
        .args([program.to_str().unwrap(), "--word"])
        .env("GLOO_SOCKET_IFNAME", "lo")
        .output()
        .unwrap();
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        ["[0] --word 0 of 2: [3.0, 3.0, 3.0]", "[1] --word 1 of 2: [3.0, 3.0, 3.0]"],
        "{error}"
    );
    assert_eq!(output.status.code(), Some(1));
    let (_, report) = error.split_once("error: rank 1 of 2 failed first: exit code 1 after ").unwrap();
    assert!(report.contains("ValueError: rank 1 fails on purpose\n"), "{error}");
}
