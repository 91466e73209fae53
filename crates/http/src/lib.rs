//! A small HTTP/1.1 server for tools that can be inspected: one thread, bounded memory, little to configure.
//!
//! It is meant to stay open on a developer's machine or a cluster's host, so it assumes that every client is
//! hostile, including web pages in the same browser. It answers `GET` and `HEAD` only, unless it is
//! configured to accept `POST` as well ([`Options::posts`]), and only requests whose `Host` it knows. Its
//! headers keep other sites from reading or framing the answer. A slow client cannot keep an honest request
//! waiting. A Unix socket ([`SocketFile`]) is for its owner alone, and needs no such name.
//!
//! Three layers, each of which can be read alone: [`HeadParser`] knows bytes and no sockets, the server's
//! loop knows sockets and no routes, and the handler is a function from [`Request`] to [`Response`].
//!
//! ```
//! use tenfold_http::{Options, Response, Server};
//!
//! let server = Server::start(Options::default(), |request| match request.path() {
//!     "/" => Response::text(200, "hello"),
//!     _ => Response::text(404, "nothing here"),
//! })?;
//! assert!(server.address().ip().is_loopback());
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Handlers run on the loop's thread, or, if they may take long, on a few separate threads
//! ([`Server::start_with_threads`]).
//!
//! [`client`] sends requests to such servers, and to others.
//!
//! Not here: requests with chunked bodies, TLS, compression.

#![warn(missing_docs)]

pub mod client;
mod connection;
mod head;
mod host;
mod request;
mod response;
mod server;
mod socket_file;
mod stream;

pub use head::{HeadLimits, HeadParser, Refusal};
pub use request::{Method, Parameters, QueryError, Request, decode_pairs};
pub use response::Response;
pub use server::{Limits, Options, Server};
pub use socket_file::SocketFile;
