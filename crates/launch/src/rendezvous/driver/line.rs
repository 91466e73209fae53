//! A store whose failures are judged: which pass, and which end the launcher.

#![expect(clippy::disallowed_methods, reason = "reads the clock to see for how long a store has failed")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenfold_store::{Deadline, ErrorKind, Fault, Request, Response, Store, Value};

use super::super::Settings;

/// A store whose requests are repeated as long as they may still succeed.
pub(super) struct Line {
    pub(super) store: Arc<dyn Store>,
    /// For one request.
    pub(super) patience: Duration,
    /// The limit for a store that cannot be reached.
    lost_after: Duration,
    /// The limit for one that can be reached, but does not answer.
    slow_after: Duration,
    /// Since when no request has succeeded.
    pub(super) broken: Option<Instant>,
}

/// Why a request has no answer.
pub(super) enum Trouble {
    /// Ask again.
    Passing,
    /// The store cannot be used any more: the error's text.
    Final(String),
}

impl Line {
    pub(super) fn new(store: Arc<dyn Store>, settings: &Settings) -> Line {
        let lost_after = settings.silence_max();
        let patience = lost_after.max(Duration::from_secs(1));
        Line { store, patience, lost_after, slow_after: settings.join_timeout.max(patience), broken: None }
    }

    pub(super) fn ask(&mut self, request: Request<'_>) -> Result<Response, Trouble> {
        self.ask_for(request, self.patience)
    }

    /// After a lost connection, the request is repeated once, immediately: every request here may be served twice.
    /// A state takes several requests, so a store that loses some of them would otherwise never get one.
    pub(super) fn ask_for(&mut self, request: Request<'_>, patience: Duration) -> Result<Response, Trouble> {
        let is_wait = matches!(request, Request::Wait { .. });
        let mut answer = self.store.call(request.clone(), Deadline::after(patience));
        if answer.as_ref().is_err_and(|fault| fault.kind == ErrorKind::Lost) && self.broken.is_none() {
            answer = self.store.call(request, Deadline::after(patience));
        }
        match answer {
            Ok(response) => {
                self.broken = None;
                Ok(response)
            }
            Err(fault) if is_wait && fault.kind == ErrorKind::Timeout => Err(Trouble::Passing),
            Err(fault) => Err(self.judge(&fault)),
        }
    }

    pub(super) fn judge(&mut self, fault: &Fault) -> Trouble {
        let broken_for = self.broken.get_or_insert_with(Instant::now).elapsed();
        let limit = match fault.kind {
            ErrorKind::Timeout => self.slow_after,
            ErrorKind::Connect | ErrorKind::Io | ErrorKind::Lost => self.lost_after,
            _ => Duration::ZERO,
        };
        if broken_for < limit {
            tracing::debug!("the store at {} is in trouble: {}", self.store.name(), fault.message);
            return Trouble::Passing;
        }
        let (name, message) = (self.store.name(), &fault.message);
        Trouble::Final(match limit.is_zero() {
            true => format!("the store at {name} cannot be used: {message}"),
            false => format!(
                "the store at {name} was lost: {message}\n  hint: check that the launcher or server that hosts it is still running"
            ),
        })
    }

    pub(super) fn get(&mut self, key: &str) -> Result<Option<Value>, Trouble> {
        match self.ask(Request::Get { key: key.as_bytes().into() })? {
            Response::Value(value) => Ok(value.filter(|value| !value.is_empty())),
            _ => Err(self.wrong_answer()),
        }
    }

    pub(super) fn set(&mut self, key: &str, value: &[u8]) -> Result<(), Trouble> {
        self.ask(Request::Set { key: key.as_bytes().into(), value: value.into() }).map(|_| ())
    }

    /// In one step: all of them or none.
    pub(super) fn set_all(&mut self, pairs: &[(&str, &[u8])]) -> Result<(), Trouble> {
        let pairs = pairs.iter().map(|&(key, value)| (key.as_bytes().into(), value.into())).collect();
        self.ask(Request::MultiSet { pairs }).map(|_| ())
    }

    pub(super) fn add(&mut self, key: &str, delta: i64) -> Result<u64, Trouble> {
        match self.ask(Request::Add { key: key.as_bytes().into(), delta })? {
            Response::Number(number) => u64::try_from(number).map_err(|_| self.wrong_answer()),
            _ => Err(self.wrong_answer()),
        }
    }

    pub(super) fn wrong_answer(&self) -> Trouble {
        Trouble::Final(format!("the store at {} sent an unexpected kind of answer", self.store.name()))
    }
}
