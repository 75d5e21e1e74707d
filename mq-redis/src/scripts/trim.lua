-- Where a group stands, removal of what all groups handled, and what others removed before this group read it.
-- KEYS: stream, notes of the topic (none: what others removed is not looked for). ARGV: group ("" for none), whether to remove (1).
-- Answer: entries removed, entries left, lowest id that the group has not settled ("" if there is no such group), entries that
-- others removed unread since the last look (-1: perhaps some, and how many is not known).
local stream, notes = KEYS[1], KEYS[2]
if redis.call('EXISTS', stream) == 0 then
  return {0, 0, '', 0}
end

-- What left the stream and was not removed by us was removed by others. Whether it had been read is told by where the group stood
-- at the last look; how many had not, only if it stands there still: some versions of the server let a group that reads on skip
-- what is gone without a trace in its counter, others keep it behind for ever.
local function missed(group)
  local theirs, info = foreign(stream, notes)
  local added, here = info['entries-added'], group['last-delivered-id']
  local first = info['first-entry'] and info['first-entry'][1]
  -- Of all entries there ever were, those up to here; of those that are gone it has to miss none any more.
  local read, sure = group['entries-read'] or -1, true
  if not less(here, info['last-generated-id']) then
    read = added
  elseif not first or less(here, first) then
    read = added - info['length']
  else
    sure = false
  end

  local note = 'at:' .. group['name']
  local noted = redis.call('HGET', notes, note) or ''
  local seen, at, before = string.match(noted, '^(%d+) (%S+) (%S+)$')
  local lost = 0
  if seen and theirs > tonumber(seen) and (not first or less(at, first) or less(at, info['max-deleted-entry-id'])) then
    lost = -1
    if not sure then
      read = -1
    elseif at == here and tonumber(before) >= 0 then
      lost = read - before
    end
  end
  -- So that the server's lag is the number of entries that are left.
  if (sure or lost ~= 0) and read ~= (group['entries-read'] or -1) then
    redis.call('XGROUP', 'SETID', stream, group['name'], here, 'ENTRIESREAD', read)
  end
  local now = theirs .. ' ' .. here .. ' ' .. read
  if now ~= noted then
    redis.call('HSET', notes, note, now)
  end
  return lost
end

local low
local own = ''
local lost = 0
for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local group = named(info)
  local keep
  if group['pending'] > 0 then
    keep = redis.call('XPENDING', stream, group['name'])[2]
    if less(group['last-delivered-id'], keep) then
      keep = group['last-delivered-id']
    end
  else
    keep = after(group['last-delivered-id'])
  end
  if group['name'] == ARGV[1] then
    own = keep
    lost = notes and missed(group) or 0
  end
  if not low or less(keep, low) then
    low = keep
  end
end
local removed = 0
if low and ARGV[2] == '1' then
  removed = redis.call('XTRIM', stream, 'MINID', '=', low)
  ours(notes, removed)
end
return {removed, redis.call('XLEN', stream), own, lost}
