-- Takes entries that are due again, and entries whose owner is dead.
-- KEYS: stream, due, tries. ARGV: group, member, most entries, lease in ms (0: only what is due), cursor over parked entries, the
-- time in ms up to which leases count: a call that is carried out later stood still with the server, as renewals did.
-- Answer: ms until the next one is due (-1: none), cursor, number of entries that are gone, entries: id, count, tries, fields, and
-- the time in ms.
local stream, due, tries = KEYS[1], KEYS[2], KEYS[3]
local group, me, most, lease, cursor = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local got, gone = {}, 0
if now > tonumber(ARGV[6]) then
  lease = 0
end

local function take(id, count)
  local claimed = redis.call('XCLAIM', stream, group, me, 0, id)
  local entry = claimed[1]
  if not entry or not entry[2] then
    redis.call('HDEL', tries, id)
    gone = gone + 1
    return
  end
  got[#got + 1] = {id, count + 1, redis.call('HGET', tries, id) or '', entry[2]}
end

local function room()
  return most - #got
end

if room() > 0 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, most)) do
    local held = redis.call('XPENDING', stream, group, id, id, 1)[1]
    if held and held[2] == '~parked' then
      take(id, held[4])
    end
    redis.call('ZREM', due, id)
  end
end

if lease > 0 then
  local parked = 0
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local name, pending, idle = info[2], info[4], info[6]
    if name == '~parked' then
      parked = pending
    elseif pending > 0 and (name == me or idle >= lease) and room() > 0 then
      for _, held in ipairs(redis.call('XPENDING', stream, group, 'IDLE', lease, '-', '+', room(), name)) do
        take(held[1], held[4])
      end
    end
  end
  -- Entries that are parked and in no index (it was deleted or evicted) come again after a lease.
  if parked > redis.call('ZCARD', due) and room() > 0 then
    local from = cursor
    cursor = '-'
    local looked = redis.call('XPENDING', stream, group, 'IDLE', lease, from, '+', 1000, '~parked')
    for _, held in ipairs(looked) do
      if room() <= 0 then
        cursor = '(' .. held[1]
        break
      end
      if not redis.call('ZSCORE', due, held[1]) then
        take(held[1], held[4])
      end
    end
    if #looked == 1000 and cursor == '-' then
      cursor = '(' .. looked[1000][1]
    end
  end
end

local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
local next_due = -1
if first[2] then
  next_due = math.max(math.floor(tonumber(first[2]) - now), 0)
end
return {next_due, cursor, gone, got, now}
