//! The file in which a Python program that uses torch's `record` stores its exception.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::time::SystemTime;

use serde_json::Value;

/// A traceback is a few KiB; longer files are not read.
const ERROR_FILE_MAX: u64 = 256 << 10;

/// The exception that a Python program stored with `record`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ErrorFile {
    pub(crate) message: String,
    pub(crate) traceback: Option<String>,
    /// In seconds since 1970: among ranks that failed together, the smallest is the first.
    pub(crate) timestamp: Option<u64>,
    /// When the file was last written.
    pub(crate) modified: Option<SystemTime>,
}

impl ErrorFile {
    /// None if there is none.
    pub(crate) fn read(path: &Path) -> Option<Result<Self, String>> {
        let (mut bytes, mut modified) = (Vec::new(), None);
        let read = File::open(path).and_then(|file| {
            modified = file.metadata().and_then(|facts| facts.modified()).ok();
            file.take(ERROR_FILE_MAX + 1).read_to_end(&mut bytes)
        });
        let name = path.display();
        match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(Err(format!("its error file {name} cannot be read: {error}"))),
            Ok(0) => None,
            Ok(_) if bytes.len() as u64 > ERROR_FILE_MAX => {
                Some(Err(format!("its error file {name} is longer than {} KiB", ERROR_FILE_MAX >> 10)))
            }
            Ok(_) => Some(
                ErrorFile::parse(&bytes)
                    .map(|file| ErrorFile { modified, ..file })
                    .ok_or_else(|| format!("its error file {name} was not written by `record`")),
            ),
        }
    }

    /// `{"message": {"message": …, "extraInfo": {"py_callstack": …, "timestamp": …}}}` or `{"message": "text"}`.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let whole: Value = serde_json::from_slice(bytes).ok()?;
        let outer = whole.get("message")?;
        if let Some(text) = outer.as_str() {
            return Some(ErrorFile {
                message: text.into(),
                traceback: None,
                timestamp: None,
                modified: None,
            });
        }
        let message = outer.get("message")?.as_str()?.to_string();
        let extra = outer.get("extraInfo");
        let traceback = extra.and_then(|extra| extra.get("py_callstack")?.as_str());
        let timestamp = extra.and_then(|extra| {
            let stamp = extra.get("timestamp")?;
            stamp.as_u64().or_else(|| stamp.as_str()?.parse().ok())
        });
        let traceback = traceback.filter(|text| !text.trim().is_empty()).map(str::to_string);
        Some(ErrorFile { message, traceback, timestamp, modified: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn an_error_file_may_hold_anything() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        let read = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            ErrorFile::read(&path)
        };
        assert_eq!(ErrorFile::read(&folder.path().join("none")), None);
        assert_eq!(read(b""), None);
        let strange = format!("its error file {} was not written by `record`", path.display());
        for bytes in
            [&b"{"[..], b"[]", b"7", b"{\"message\": {}}", b"{\"message\": {\"message\": 7}}", b"\xff"]
        {
            assert_eq!(read(bytes), Some(Err(strange.clone())), "{}", String::from_utf8_lossy(bytes));
        }
        assert_eq!(read("[".repeat(200_000).as_bytes()), Some(Err(strange)));
        let long = format!("its error file {} is longer than 256 KiB", path.display());
        assert_eq!(read(&vec![b' '; (256 << 10) + 1]), Some(Err(long)));
        let odd =
            read(br#"{"message": {"message": "m", "extraInfo": {"py_callstack": "", "timestamp": 7}}}"#);
        let expected = ErrorFile { message: "m".into(), traceback: None, timestamp: Some(7), modified: None };
        let odd = odd.map(|file| file.map(|file| ErrorFile { modified: None, ..file }));
        assert_eq!(odd, Some(Ok(expected)));
        assert_eq!(
            ErrorFile::read(folder.path()),
            Some(Err(format!(
                "its error file {} cannot be read: Is a directory (os error 21)",
                folder.path().display()
            )))
        );
    }
}
