//! What the folder writes: the next state, and the keys that are not needed any more.

use std::time::Duration;

use tenfold_dashboard::job::{Head, Phase, RUNS};
use tenfold_store::{Request, Response};

use super::super::inbox::Inbox;
use super::super::member::{What, Wish};
use super::super::state::{Change, State, head_text};
use super::line::Trouble;
use super::*;

impl Agent {
    /// Writes a head in place of the one that was read: this node begins a job, or takes over as folder.
    pub(super) fn claim(&mut self, head: Head) -> Result<(), Trouble> {
        let text = self.to_text(&head)?;
        if !self.replace_head(&text)? {
            return Ok(());
        }
        let before = self.view.as_ref().map(|view| &view.head);
        let old = before.filter(|before| before.job != head.job).cloned();
        self.adopt(Some(text.as_slice().into()))?;
        self.announce(head.turn)?;
        if let Some(old) = &old {
            let counter = [self.keys.replaced(old.job)];
            for key in texts(&self.keys, old).iter().chain(&counter) {
                self.forget(key)?; // of the job before
            }
        }
        Ok(())
    }

    pub(super) fn to_text(&self, head: &Head) -> Result<Vec<u8>, Trouble> {
        head_text(head).map_err(|what| {
            Trouble::Final(format!(
                "the state of the job `{}` cannot be written: {what}",
                self.settings.run_id
            ))
        })
    }

    /// Writes a head in place of the present one. If another node was quicker, takes what is there.
    pub(super) fn replace_head(&mut self, text: &[u8]) -> Result<bool, Trouble> {
        let key = self.keys.state();
        let expected = self.text.clone();
        let expected = expected.as_ref().map_or(&b""[..], |text| text);
        let request = Request::CompareSet {
            key: key.as_bytes().into(),
            expected: expected.into(),
            desired: text.into(),
        };
        let Response::Value(Some(found)) = self.line.ask(request)? else {
            return Err(self.line.wrong_answer());
        };
        if *found == *text {
            return Ok(true);
        }
        // If the key was deleted, the expected value is returned.
        let is_deleted = *found == *expected;
        let found = if is_deleted { self.line.get(&key)? } else { Some(found) };
        self.adopt(found)?;
        Ok(false)
    }

    /// Wakes the nodes that wait for this turn.
    pub(super) fn announce(&mut self, turn: u64) -> Result<(), Trouble> {
        self.line.set(&self.keys.turn(turn), b"1")?;
        if turn > TURNS_KEPT {
            self.forget(&self.keys.turn(turn - TURNS_KEPT))?;
        }
        Ok(())
    }

    /// Folds the wishes that there are, if it is time. Returns when to look again.
    pub(super) fn fold(&mut self, own: Option<Wish>, is_beat: bool) -> Result<Option<Duration>, Trouble> {
        let count = self.line.add(&self.keys.wishes(), 0)?;
        let now = self.now();
        let Some(folded) = &mut self.folded else { return Ok(None) };
        folded.inbox.counted(count);
        let due = folded.inbox.due(&folded.state, now);
        folded.is_gathering = own.is_none() && !is_beat && due.is_some_and(|due| now < due);
        if let Some(due) = due.filter(|_| folded.is_gathering) {
            let look = now + folded.inbox.gather(&folded.state) / GATHER_LOOKS;
            return Ok(Some(due.min(look.max(now + Duration::from_millis(1)))));
        }
        let (wishes, parting) = self.read_wishes(now)?;
        let wishes: Vec<Wish> = own.into_iter().chain(wishes).collect();
        let Some(folded) = &mut self.folded else { return Ok(None) };
        let fold = self.member.fold(&folded.state, &wishes, folded.inbox.complete(), now);
        folded.inbox.folded(self.settings.silence_max(), now);
        let due = folded.inbox.due(&folded.state, now);
        for (id, text) in fold.answers {
            match id == self.node.id {
                true => self.member.refuse(text),
                false => self.line.set(&self.keys.answer(&id), text.as_bytes())?,
            }
        }
        let Some((next, change)) = fold.next else { return Ok(fold.wake.into_iter().chain(due).min()) };
        if self.write(next, &change)? {
            for number in parting {
                self.forget(&self.keys.wish(number))?;
            }
        }
        Ok(Some(now)) // decide on what was written
    }

    /// Something went wrong after wishes were read: they are still there.
    pub(super) fn fold_again(&mut self) {
        if let Some(folded) = &mut self.folded {
            folded.inbox = Inbox::new(folded.state.head.folded);
        }
    }

    /// The wishes that the folder has not seen, and the numbers of those that no other node will remove.
    pub(super) fn read_wishes(&mut self, now: Duration) -> Result<(Vec<Wish>, Vec<u64>), Trouble> {
        let numbers = self.folded.as_ref().map_or(Vec::new(), |folded| folded.inbox.numbers());
        let names: Vec<String> = numbers.iter().map(|&number| self.keys.wish(number)).collect();
        let values = self.read(&names)?;
        let (mut wishes, mut parting) = (Vec::new(), Vec::new());
        for (&number, value) in numbers.iter().zip(values) {
            if let Some(folded) = &mut self.folded {
                folded.inbox.looked(number, value.is_some(), now);
            }
            let wish = value.and_then(|value| serde_json::from_slice::<Wish>(&value).ok());
            let Some(wish) = wish else { continue };
            parting.extend(Some(number).filter(|_| wish.what.is_parting()));
            wishes.push(wish);
        }
        // A node that has left, or is known to be dead, has no beat: a wish of it to join came late.
        let is_join = |wish: &&Wish| matches!(wish.what, What::Join { .. });
        let names: Vec<String> =
            wishes.iter().filter(is_join).map(|wish| self.keys.beat(&wish.node)).collect();
        let mut beats = self.read(&names)?.into_iter();
        wishes.retain(|wish| !is_join(&wish) || beats.next().flatten().is_some());
        Ok((wishes, parting))
    }

    /// Writes the next state; false if this node is not the folder any more.
    pub(super) fn write(&mut self, next: State, change: &Change) -> Result<bool, Trouble> {
        let json = |error: serde_json::Error| Trouble::Final(error.to_string());
        for pages in change.pages.chunks(PAGES_WRITTEN_MAX) {
            let mut pairs = Vec::new();
            for (index, seats) in pages {
                let key = self.keys.page(*index, change.stamp);
                pairs.push((key, serde_json::to_vec(seats).map_err(json)?));
            }
            let pairs: Vec<(&str, &[u8])> =
                pairs.iter().map(|(key, text)| (key.as_str(), text.as_slice())).collect();
            self.line.set_all(&pairs)?;
        }
        if let Some(failure) = &change.failure {
            let text = serde_json::to_vec(failure).map_err(json)?;
            self.line.set(&self.keys.failure(change.stamp), &text)?;
        }
        let text = self.to_text(&next.head)?;
        if !self.replace_head(&text)? {
            for (index, _) in &change.pages {
                self.forget(&self.keys.page(*index, change.stamp))?;
            }
            return Ok(false);
        }
        self.text = Some(text.as_slice().into());
        match self.folded.take() {
            Some(folded) if next.folder == self.node.id => self.take(next, folded.inbox),
            _ => self.view = Some(next.view(&self.node.id)),
        }
        if let Some(turn) = change.turn {
            self.announce(turn)?;
        }
        self.clean(change)?;
        Ok(true)
    }

    /// Removes what the last write has replaced.
    pub(super) fn clean(&mut self, change: &Change) -> Result<(), Trouble> {
        for &(index, stamp) in &change.pages_old {
            self.forget(&self.keys.page(index, stamp))?;
        }
        if let Some(stamp) = change.failure_old {
            self.forget(&self.keys.failure(stamp))?;
        }
        // Removed nodes do not beat any more, or will join again.
        for id in &change.removed {
            self.forget(&self.keys.node(id))?;
            self.forget(&self.keys.beat(id))?;
        }
        Ok(())
    }

    /// This node ends: another one has to fold what comes.
    pub(super) fn hand_over(&mut self) -> Result<(), Trouble> {
        let Some(folded) = self.folded.as_ref().filter(|folded| !folded.state.settled) else { return Ok(()) };
        let next = self.member.hand_over(&folded.state);
        if let Some((next, change)) = next {
            self.write(next, &change)?;
        }
        Ok(())
    }

    pub(super) fn forget(&mut self, key: &str) -> Result<(), Trouble> {
        self.line.ask(Request::Delete { key: key.as_bytes().into() }).map(|_| ())
    }

    /// For the dashboard; a store that cannot append works without it.
    pub(super) fn list_run(&mut self) {
        let line = format!("{}\n", self.settings.run_id);
        let request = Request::Append { key: RUNS.as_bytes().into(), value: line.as_bytes().into() };
        if self.line.ask(request).is_ok() {
            let _next_time = self.forget_old_runs();
        }
    }

    /// A server may outlive thousands of jobs. Jobs that began long ago and are over for all their nodes are
    /// removed with all their keys. A job that is not over, or whose nodes all died, stays.
    pub(super) fn forget_old_runs(&mut self) -> Result<(), Trouble> {
        let Some(list) = self.line.get(RUNS)? else { return Ok(()) };
        let text = String::from_utf8_lossy(&list).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let old = lines.len().saturating_sub(RUNS_KEPT);
        let mut removed: Vec<&str> = Vec::new();
        for &run in &lines[..old] {
            if removed.len() == RUNS_REMOVED {
                break;
            }
            let is_recent = lines[old..].contains(&run) || run == self.settings.run_id;
            if !is_recent && !removed.contains(&run) && self.forget_run(run)? {
                removed.push(run);
            }
        }
        if removed.is_empty() {
            return Ok(());
        }
        let is_kept = |(index, run): &(usize, &&str)| *index >= old || !removed.contains(run);
        let kept: String =
            lines.iter().enumerate().filter(is_kept).map(|(_, run)| format!("{run}\n")).collect();
        // If another job was listed meanwhile, the next one to begin finds these removed.
        let (expected, desired) = ((&*list).into(), kept.as_bytes().into());
        self.line.ask(Request::CompareSet { key: RUNS.as_bytes().into(), expected, desired }).map(|_| ())
    }

    /// Removes the keys of a job that is over; false if it is not.
    pub(super) fn forget_run(&mut self, run: &str) -> Result<bool, Trouble> {
        let keys = Keys::new(run);
        let Some(text) = self.line.get(&keys.state())? else { return Ok(true) };
        let Ok(head) = parse_head(&text) else { return Ok(false) };
        if head.phase != Phase::Over || !head.settled {
            return Ok(false);
        }
        // The state last: if this node does not get that far, the job stays listed, and the next one
        // continues.
        let pages: Vec<String> =
            head.pages.iter().enumerate().map(|(index, &stamp)| keys.page(index, stamp)).collect();
        for page in self.read(&pages)?.into_iter().flatten() {
            for seat in parse_page(&page).unwrap_or_default() {
                self.forget(&keys.node(&seat.node.id))?;
                self.forget(&keys.beat(&seat.node.id))?;
            }
        }
        for turn in head.turn.saturating_sub(TURNS_KEPT)..=head.turn {
            self.forget(&keys.turn(turn))?;
        }
        for key in texts(&keys, &head) {
            self.forget(&key)?;
        }
        self.forget(&keys.wishes())?;
        self.forget(&keys.replaced(head.job))?;
        self.forget(&keys.state())?;
        Ok(true)
    }
}
