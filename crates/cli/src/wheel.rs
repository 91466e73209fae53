//! The command `tenfold` as the Python package installs it: built without benchmarks.

use std::process::ExitCode;

use tenfold_cli::Program;

fn main() -> ExitCode {
    tenfold_cli::main(std::env::args_os().skip(1), Program::this_executable()).into()
}
