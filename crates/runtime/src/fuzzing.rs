//! What peers send, as the fuzzer sees it. Only with the feature `fuzzing`, and not for use by programs.

pub use crate::fabric::hostile::{LINES, ME, Rank};
use crate::transport::line::{self, Frame};
use crate::wire::{ControlFrame, FabricId, Hello, Refused};

/// The hello at the beginning of `bytes`, said to [`ME`]: its bytes as they would be written again, nothing if it is not
/// whole, or why it is refused.
///
/// # Errors
/// Says why it is refused.
pub fn hello(bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let hello = Hello::decode(bytes, FabricId(ME)).map_err(show)?;
    Ok(hello.map(|hello| hello.encode().to_vec()))
}

/// Bytes of a hello.
pub const HELLO: usize = Hello::LEN;

/// The same for the control frame at the beginning of `bytes`, with its length there.
///
/// # Errors
/// Says why it is refused.
pub fn frame(bytes: &[u8]) -> Result<Option<(Vec<u8>, usize)>, String> {
    let decoded = ControlFrame::decode(bytes).map_err(show)?;
    Ok(decoded.map(|(frame, length)| {
        let mut again = Vec::new();
        frame.encode(&mut again);
        (again, length)
    }))
}

/// No control frame is longer.
pub const FRAME_MAX: usize = ControlFrame::LEN_MAX;

/// The header of a message of a group, of at most `len_max` bytes: its bytes as they would be written again, and how long the
/// message is.
///
/// # Errors
/// Says why it is refused.
pub fn header(bytes: &[u8; HEADER], len_max: usize) -> Result<([u8; HEADER], usize), String> {
    let frame = Frame::decode(bytes, len_max).map_err(|error| error.to_string())?;
    let len = if let Frame::Message { len, .. } = frame { len } else { 0 };
    Ok((frame.encode(), len))
}

/// Bytes of that header.
pub const HEADER: usize = line::HEADER;

fn show(refused: Refused) -> String {
    refused.to_string()
}
