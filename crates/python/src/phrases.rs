//! c10d's words for errors, because programs look for them. Each is put behind our own message.

use std::time::Duration;

use tenfold::ErrorKind as GroupFault;
use tenfold_store::{ErrorKind, Scene};

/// A text with c10d's words at the end of its first line; the lines below are evidence and advice.
pub(crate) fn with_words(text: &str, words: Option<String>) -> String {
    match (words, text.split_once('\n')) {
        (None, _) => text.to_string(),
        (Some(words), None) => format!("{text} ({words})"),
        (Some(words), Some((first, rest))) => format!("{first} ({words})\n{rest}"),
    }
}

/// What c10d's stores say where ours fail so.
pub(crate) fn of_store(error: &tenfold_store::Error) -> Option<String> {
    let (scene, message) = (error.scene(), error.message());
    let (operation, keys) = scene.request.split_once(' ').unwrap_or((&scene.request, ""));
    let milliseconds = scene.limit.unwrap_or(scene.elapsed).as_millis();
    match (error.kind(), operation) {
        (ErrorKind::Timeout, "barrier") => {
            let key = full_keys(scene, keys, "").pop()?;
            Some(format!("barrier timeout after {milliseconds}ms, key: {key}"))
        }
        (ErrorKind::Timeout, "connect") => {
            let (joined, expected) = message.strip_suffix(" clients joined")?.split_once(" of ")?;
            let seconds = scene.limit.unwrap_or(scene.elapsed).as_secs_f64().ceil();
            Some(format!(
                "Timed out after {seconds} seconds waiting for clients. {joined}/{expected} clients joined."
            ))
        }
        (ErrorKind::Timeout, "get") if scene.store.starts_with("file ") => {
            let key = full_keys(scene, keys, "").pop()?;
            Some(format!("Timeout waiting for key: {key} after {milliseconds} ms"))
        }
        (ErrorKind::Timeout, _) if !is_tcp(scene) => Some("Wait timeout".to_string()),
        (ErrorKind::Timeout, _) => {
            let keys = full_keys(scene, keys, "/").join(", ");
            Some(format!("wait timeout after {milliseconds}ms, keys: {keys}"))
        }
        (ErrorKind::Connect, _) if message.starts_with("cannot listen on ") => {
            let port = scene.store.rsplit_once(':')?.1;
            let why = if message.contains("address already in use") {
                "code: -98, name: EADDRINUSE, message: address already in use"
            } else {
                "see before"
            };
            Some(format!(
                "The server socket has failed to listen on any local network address. port: {port}, {why}"
            ))
        }
        (ErrorKind::Connect, "connect") if message.starts_with("no store answered") => {
            let (host, port) = scene.store.rsplit_once(':')?;
            Some(format!(
                "The client socket has timed out after {milliseconds}ms while trying to connect to ({host}, {port})."
            ))
        }
        (ErrorKind::Argument, "multi_set") => {
            Some("multiSet keys and values vectors must be of same size".to_string())
        }
        (ErrorKind::Unsupported, "queue_push" | "queue_pop" | "queue_len") => {
            Some("queue support is not implemented.".to_string())
        }
        _ => None,
    }
}

/// How the runtime's message begins where the limit of a wait has passed, and not that of the operation.
const GOES_ON: &str = "not done after a wait";

/// What Gloo says where a peer has ended, or an operation is not over in time. It was waited for up to `waited`, and may
/// take `limit` in all.
pub(crate) fn of_group(
    error: &tenfold::Error,
    waited: Option<Duration>,
    limit: Option<Duration>,
) -> Option<String> {
    match error.kind() {
        GroupFault::PeerLost if error.peer().is_some() => {
            return Some("Connection closed by peer".to_string());
        }
        GroupFault::Timeout => {}
        _ => return None,
    }
    let waited = waited.filter(|_| error.message().starts_with(GOES_ON));
    let kind = error.scene()?.label.kind;
    let is_message =
        matches!(kind, tenfold::OpKind::Send | tenfold::OpKind::Recv | tenfold::OpKind::RecvAnySource);
    let direction = if kind == tenfold::OpKind::Send { "send" } else { "recv" };
    match (waited, limit) {
        (Some(_), _) if !is_message => Some("Operation timed out!".to_string()),
        (Some(time), _) | (None, Some(time)) => {
            let milliseconds = (time.as_secs_f64() * 1000.0).ceil(); // a part of it may have gone by
            Some(format!("Timed out waiting {milliseconds}ms for {direction} operation to complete"))
        }
        (None, None) => None,
    }
}

/// What c10d says where not all ranks join in time: its store does.
pub(crate) fn of_connect(error: &tenfold::Error, limit: Option<f64>) -> Option<String> {
    let seconds = limit.filter(|_| error.kind() == GroupFault::Timeout)?;
    Some(format!("wait timeout after {:.0}ms", seconds * 1000.0))
}

fn is_tcp(scene: &Scene) -> bool {
    !scene.store.starts_with("file ") && !scene.store.starts_with("this process")
}

/// The keys of a request as the innermost store has them, below the prefixes of those around it.
fn full_keys(scene: &Scene, keys: &str, root: &str) -> Vec<String> {
    let prefixes = scene.store.split(" under `").skip(1);
    let path: String = prefixes.map(|prefix| format!("{}/", prefix.trim_end_matches('`'))).collect();
    let listed = keys.split(" and ").next().unwrap_or(keys);
    listed.split(", ").map(|key| format!("{root}{path}{}", key.trim_matches('`'))).collect()
}
