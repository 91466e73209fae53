//! A rank on a `FileStore` that executes commands, one per line: the other side of tests that run stock
//! PyTorch on the same file.
//!
//! ```text
//! $ file_store_peer PATH WORLD_SIZE      WORLD_SIZE -1: the file stays
//! set color blue
//! ok
//! get color
//! blue
//! ```
//!
//! Commands: `set K V`, `get K`, `add K N`, `add_many K N TIMES`, `append K V`, `compare_set K EXPECTED DESIRED`
//! (`""` is the empty value), `check K…`, `wait K…`, `delete K`, `keys`, `num_keys`, `barrier K WORLD`,
//! `timeout SECONDS`, `clone`, `quit`. Each prints one line; a failure prints `error KIND: TEXT`.

use std::error::Error;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Duration;

use tenfold_store::{FileStore, Store, StoreExt};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: file_store_peer PATH WORLD_SIZE";
    let path = arguments.next().ok_or(usage)?;
    let world_size = usize::try_from(arguments.next().ok_or(usage)?.parse::<i64>()?).ok();
    let mut out = std::io::stdout();
    let store = match FileStore::open(&path, world_size) {
        Ok(store) => store,
        Err(error) => return Ok(writeln!(out, "{}", show(&error))?),
    };
    writeln!(out, "ready")?;
    let mut clones = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').map(|word| if word == "\"\"" { "" } else { word }).collect();
        if words == ["quit"] {
            break;
        }
        let answer = obey(&store, &words, &mut clones).unwrap_or_else(|error| show(&error));
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn obey(
    store: &FileStore,
    words: &[&str],
    clones: &mut Vec<Arc<dyn Store>>,
) -> tenfold_store::Result<String> {
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    Ok(match *words {
        ["set", key, value] => store.set(key, value).map(|()| "ok".into())?,
        ["get", key] => text(&store.get(key)?),
        ["add", key, number] => store.add(key, number.parse().unwrap_or(0))?.to_string(),
        ["add_many", key, number, times] => {
            let mut sum = 0;
            for _ in 0..times.parse().unwrap_or(0) {
                sum = store.add(key, number.parse().unwrap_or(0))?;
            }
            sum.to_string()
        }
        ["append", key, value] => store.append(key, value).map(|()| "ok".into())?,
        ["compare_set", key, expected, desired] => text(&store.compare_set(key, expected, desired)?),
        ["check", ref keys @ ..] => store.check(keys)?.to_string(),
        ["wait", ref keys @ ..] => store.wait(keys).map(|()| "ok".into())?,
        ["delete", key] => store.delete_key(key)?.to_string(),
        ["keys"] => {
            let mut keys: Vec<_> = store.list_keys()?.iter().map(|key| text(key)).collect();
            keys.sort();
            keys.join(" ")
        }
        ["num_keys"] => store.num_keys()?.to_string(),
        ["barrier", key, world] => store.barrier(key, world.parse().unwrap_or(0)).map(|()| "ok".into())?,
        ["timeout", seconds] => {
            store.set_timeout(Duration::from_secs_f64(seconds.parse().unwrap_or(0.0)));
            "ok".into()
        }
        ["clone"] => {
            clones.push(store.try_clone()?);
            "ok".into()
        }
        _ => "error: unknown command".into(),
    })
}

fn show(error: &tenfold_store::Error) -> String {
    format!("error {:?}: {}", error.kind(), error.to_string().replace('\n', " "))
}
