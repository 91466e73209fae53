//! What the server answers, and which clients get which part of it.

use super::*;

impl Merge {
    /// An answer of the server. `body` makes a value of its bytes.
    pub(crate) fn answer(
        &mut self,
        number: u64,
        status: Status,
        body: &[u8],
        effects: &mut Effects,
    ) -> Result<(), Nonsense> {
        if !self.pipe.answered(number, body.len()) {
            return Err(Nonsense::Number(number));
        }
        let result = if self.waits.contains_key(&number) {
            self.answer_wait(number, status, body, effects)
        } else if let Some(flight) = self.flights.remove(&number) {
            match status {
                Status::Done | Status::Refused => self.answer_flight(number, flight, status, body, effects),
                _ => Err(Nonsense::Answer(number)),
            }
        } else {
            // A wait that was left: an item for it is for another client.
            if let (Status::One, Some(promise)) = (status, promise(body)) {
                self.pipe.send(&Ask::Leave(promise));
            }
            Ok(())
        };
        if !self.crowded.is_empty() && !self.is_crowded() {
            for client in std::mem::take(&mut self.crowded) {
                self.resume(client, effects);
            }
        }
        result
    }

    fn answer_flight(
        &mut self,
        number: u64,
        flight: Flight,
        status: Status,
        body: &[u8],
        effects: &mut Effects,
    ) -> Result<(), Nonsense> {
        let refusal = (status == Status::Refused).then(|| reason(body));
        match flight {
            Flight::One(client) => {
                if let Some(local) = self.locals.get_mut(&client) {
                    local.pops.retain(|pop| *pop != number);
                }
                let reply = Reply::Bytes(body.into());
                self.answer_one(client, refusal.as_deref(), reply, effects);
            }
            Flight::Read(bytes) => {
                let Some(shared) = self.reads.remove(&bytes) else { return Ok(()) };
                let value = Value::from(body);
                for client in shared.riding {
                    let reply = Reply::Bytes(value.clone());
                    self.answer_one(client, refusal.as_deref(), reply, effects);
                }
                if !shared.held.is_empty()
                    && let Command::Call(request) = decode(&bytes)
                {
                    let next = self.pipe.send(&Ask::Call(request));
                    self.flights.insert(next, Flight::Read(bytes.clone()));
                    shared.held.iter().for_each(|client| self.release(*client, effects));
                    self.reads.insert(bytes, Shared { riding: shared.held, held: Vec::new() });
                }
            }
            Flight::Add(key) => {
                let Some(shared) = self.adds.remove(&key) else { return Ok(()) };
                let sum = match (&refusal, <[u8; 8]>::try_from(body)) {
                    (Some(_), _) => 0,
                    (None, Ok(bytes)) => i64::from_le_bytes(bytes),
                    (None, Err(_)) => return Err(Nonsense::Answer(number)),
                };
                let total = shared.riding.iter().fold(0_i64, |total, (_, delta)| total.wrapping_add(*delta));
                let mut partial = sum.wrapping_sub(total);
                for (client, delta) in shared.riding {
                    partial = partial.wrapping_add(delta);
                    self.answer_one(client, refusal.as_deref(), Reply::Number(partial), effects);
                }
                if !shared.held.is_empty() {
                    let delta =
                        shared.held.iter().fold(0_i64, |total, (_, delta)| total.wrapping_add(*delta));
                    let next = self.pipe.send(&Ask::Call(Request::Add { key: Bytes::from(&*key), delta }));
                    self.flights.insert(next, Flight::Add(key.clone()));
                    shared.held.iter().for_each(|(client, _)| self.release(*client, effects));
                    self.adds.insert(key, Shared { riding: shared.held, held: Vec::new() });
                }
            }
        }
        Ok(())
    }

    fn answer_one(&mut self, client: LocalId, refusal: Option<&str>, reply: Reply, effects: &mut Effects) {
        let Some(local) = self.locals.get_mut(&client) else { return }; // it has left
        local.under_way -= 1;
        match refusal {
            Some(reason) => effects.refused.push((client, reason.into())),
            None => effects.replies.push((client, reply)),
        }
        self.resume(client, effects);
    }

    fn answer_wait(
        &mut self,
        number: u64,
        status: Status,
        body: &[u8],
        effects: &mut Effects,
    ) -> Result<(), Nonsense> {
        let what = self.waits[&number].what.clone();
        match status {
            Status::Parked => {
                if let Some(wait) = self.waits.get_mut(&number) {
                    wait.is_registered = true;
                    let waiters: Vec<LocalId> = wait.waiters.iter().copied().collect();
                    waiters.into_iter().for_each(|client| self.resume(client, effects));
                }
                self.settle(number, &what, Some(number), effects);
            }
            Status::Joined => {
                let current = match &what {
                    What::Keys(keys) => self.groups.get(keys).filter(|group| group.under_way == Some(number)),
                    What::Barrier(..) => None,
                };
                let Some(current) = current.and_then(|group| group.current) else {
                    return Err(Nonsense::Answer(number));
                };
                let joining = self.end_wait(number, effects);
                for client in &joining {
                    self.local(*client).waiting = Some(Waiting::In(current));
                    self.resume(*client, effects);
                }
                let Some(wait) = self.waits.get_mut(&current) else { return Err(Nonsense::Answer(number)) };
                wait.waiters.extend(joining);
                self.settle(number, &what, Some(current), effects);
            }
            Status::Done => {
                for client in self.end_wait(number, effects) {
                    effects.replies.push((client, Reply::Ready));
                }
                self.settle(number, &what, None, effects);
            }
            Status::Refused => {
                let reason = reason(body);
                for client in self.end_wait(number, effects) {
                    effects.refused.push((client, reason.clone()));
                }
                self.settle(number, &what, None, effects);
            }
            Status::One => {
                let promise = promise(body).ok_or(Nonsense::Answer(number))?;
                match self.waits.get_mut(&number).and_then(|wait| wait.waiters.pop_front()) {
                    None => drop(self.pipe.send(&Ask::Leave(promise))),
                    Some(first) => {
                        let local = self.local(first);
                        (local.waiting, local.promised) = (None, Some(promise));
                        effects.replies.push((first, Reply::Ready));
                        self.resume(first, effects);
                    }
                }
                self.leave_if_empty(number);
            }
        }
        Ok(())
    }

    /// Takes the clients out of a wait that has ended.
    fn end_wait(&mut self, number: u64, effects: &mut Effects) -> VecDeque<LocalId> {
        let waiters = self.waits.remove(&number).map(|wait| wait.waiters).unwrap_or_default();
        for client in &waiters {
            self.local(*client).waiting = None;
            self.resume(*client, effects);
        }
        waiters
    }

    /// A request of a group is answered: `current` is the wait that others can join from now on, if it has
    /// one. Sends the next request.
    fn settle(&mut self, number: u64, what: &What, current: Option<u64>, effects: &mut Effects) {
        match what {
            What::Keys(keys) => {
                let Some(group) = self.groups.get_mut(keys) else { return };
                let was_under_way = group.under_way == Some(number);
                let before = group.current;
                if was_under_way {
                    group.under_way = None;
                    if current.is_some() {
                        group.current = current;
                    }
                }
                if current.is_none() && group.current == Some(number) {
                    group.current = None;
                }
                self.register(keys, effects);
                if was_under_way {
                    for wait in [before, current].into_iter().flatten() {
                        self.leave_if_empty(wait);
                    }
                }
            }
            What::Barrier(key, world) => {
                let barrier = (key.clone(), *world);
                let Some(arrivals) = self.barriers.get(&barrier) else { return };
                if arrivals.under_way == number {
                    let arrivals = self.barriers.remove(&barrier).expect("it was just looked at");
                    if arrivals.count > 0 {
                        self.send_arrivals(barrier, arrivals.count, arrivals.held, effects);
                    }
                }
                self.leave_if_empty(number);
            }
        }
    }
}
