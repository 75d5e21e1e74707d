-- How many entries are ahead of a group, without the server's counter of what it read: Redis 7.0 neither writes that to its
-- append-only file nor sends it to replicas, so that after a restart or a failover it stays behind, and the lag made of it is too high.
-- KEYS: stream. ARGV: group, most entries to count one by one, whether to correct the counter (1).
-- Answer: entries ahead, whether these are all (1) or at least so many (0). Nothing if there is no such group.
local stream, most = KEYS[1], tonumber(ARGV[2])
-- So that a look at large entries does not hold up the server for long.
local STEP, MOST_BYTES = 16, 8000000
local own = group_of(stream, ARGV[1])
if not own then
  return {}
end

local function count(from, upto)
  local n, bytes = 0, 0
  while n < most and bytes < MOST_BYTES do
    local found = redis.call('XRANGE', stream, from, upto, 'COUNT', STEP)
    for _, entry in ipairs(found) do
      for _, part in ipairs(entry[2]) do
        bytes = bytes + #part
      end
    end
    n = n + #found
    if #found < STEP then
      return n, true
    end
    from = '(' .. found[STEP][1]
  end
  return n, false
end

local info = named(redis.call('XINFO', 'STREAM', stream))
local added, length, here = info['entries-added'], info['length'], own['last-delivered-id']
local first = info['first-entry'] and info['first-entry'][1]
local ahead, all, read = 0, true, -1
if not less(here, info['last-generated-id']) then
  read = added
elseif not first or less(here, first) then
  ahead = length
  -- Else some are gone, and whether it had read them is what the counter would tell.
  read = length == added and 0 or -1
else
  local behind
  behind, all = count('-', here)
  ahead = length - behind
  if all and not less(here, info['max-deleted-entry-id']) then
    read = added - ahead
  end
  if not all then
    ahead, all = count('(' .. here, '+')
  end
end
if ARGV[3] == '1' and (own['entries-read'] or -1) ~= read then
  redis.call('XGROUP', 'SETID', stream, ARGV[1], here, 'ENTRIESREAD', read)
end
return {ahead, all and 1 or 0}
