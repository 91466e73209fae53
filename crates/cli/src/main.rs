//! The command `tenfold` as a program; all of its code is in the library beside this file.

use std::process::ExitCode;

use tenfold_cli::Program;

fn main() -> ExitCode {
    tenfold_cli::main(std::env::args_os().skip(1), Program::this_executable()).into()
}
