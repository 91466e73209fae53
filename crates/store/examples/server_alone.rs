//! A store server and nothing else, for tools that count instructions. It stops when its standard input ends.

use std::io::Read;

use tenfold_store::{Server, ServerOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = Server::start(ServerOptions::new("127.0.0.1", 0))?;
    println!("listening on {}", server.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
