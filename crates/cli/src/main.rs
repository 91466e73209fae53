//! The command `tenfold`.

mod bench;

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
#[command(name = "tenfold", version, about)]
enum Cli {
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let Cli::Bench(args) = Cli::parse();
    match bench::run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}
