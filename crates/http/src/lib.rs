//! A small HTTP/1.1 responder for tools that want to be looked into: one thread, bounded memory, little to configure.
//!
//! It is meant to be left open on a developer's machine or a cluster's host, so it assumes that everybody who reaches it
//! is hostile, web pages in the same browser included. It answers `GET` and `HEAD` only, unless it is told to take `POST` as
//! well ([`Options::posts`]), to requests whose `Host` it knows, with headers that keep other sites from reading or framing the answer; and nobody can keep an honest request
//! waiting by being slow. A Unix socket ([`SocketFile`]) is for its owner alone, and needs no such name.
//!
//! Three layers, each of which can be read alone: [`HeadParser`] knows bytes and no sockets, the server's loop knows
//! sockets and no routes, and the handler is a function from [`Request`] to [`Response`].
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
//! Handlers run on the loop's thread, or, if they may take long, on a few threads of their own
//! ([`Server::start_with_threads`]).
//!
//! [`client`] asks such servers, and others.
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
